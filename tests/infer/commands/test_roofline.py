"""python -m infer roofline from its options to its files."""

import json
import re

import pytest

from laneformer.infer.__main__ import main
from laneformer.layout import LAYOUTS
from tests.support.hf.configs import MIXTRAL

VALUES = {
    "model_type": "laneformer_tp",
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_lanes": 4,
    "max_position_embeddings": 64,
    "use_comm": True,
}
QWEN = {
    "model_type": "qwen3",
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(VALUES))
    return tmp_path


def test_laneformer_report_is_complete(folder, capsys):
    files = ("--json", str(folder / "sub/r.json"), "--png", str(folder / "sub/r.png"))
    sweeps = ("--sweep", "layout", "lanes", "delay", "context", "precision", "--agent", "--rate", "2000")
    assert main(["roofline", "--checkpoint", str(folder), *sweeps, *files]) == 0
    out, record = capsys.readouterr().out, json.loads((folder / "sub/r.json").read_text())
    tables = {table["table"]: table for table in record["tables"]}
    assert list(tables) == ["bytes", "time", "speed", "layout", "lanes", "delay", "context", "precision", "agent"]
    for table in tables.values():
        assert table["title"] in out and f"Assumes: {table['assumptions']}." in out
        assert len(table["status"]) > 1 or {row["status"] for row in table["rows"]} == {"projected", "measured"}
        assert set(table["status"].values()) <= {"projected"}
    assert {row["layout"].split("(")[0] for row in tables["layout"]["rows"]} == set(LAYOUTS)
    assert [row["lanes"] for row in tables["lanes"]["rows"]] == [1, 2, 4, 8]
    total = tables["time"]["rows"][-1]
    assert total["us/token"] == pytest.approx(sum(row["us/token"] for row in tables["time"]["rows"][:-1]))
    assert [row["status"] for row in tables["speed"]["rows"] if row["tok/s"] == 2000] == ["measured"]
    assert [row["origin"] for row in tables["agent"]["rows"]][-2:] == ["projected", "measured"]
    assert "4 x NVIDIA H200 SXM" in out and record["asked"]["rate"] == 2000
    assert (folder / "sub/r.png").read_bytes().startswith(b"\x89PNG")


def test_config_layout_device_and_rate_are_used(folder, capsys):
    assert (
        main(
            [
                "roofline",
                "--checkpoint",
                str(folder / "config.json"),
                "--layout",
                "tp",
                "--device",
                "mi300x",
                "--devices",
                "2",
                "--launches",
                "250",
                "--rate",
                "500",
                "--rate-status",
                "simulated",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "waits of layout tp" in out and "8 exposed landings" in out and "2 x AMD Instinct MI300X" in out
    assert re.search(r"kernel launches +250 x 4.5 us +1,125.00 +[\d.]+ +889\n", out)
    assert re.search(r"given as simulated, explained by --sync-us [\d.]+ +500 .* simulated\n", out)


def test_dense_model_uses_measured_figures(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    node = ("--device", "custom", "--bandwidth", "100", "--sync-us", "0", "--context", "0", "--precision", "float32")
    assert main(["roofline", "--checkpoint", str(tmp_path), *node]) == 0
    alone = capsys.readouterr().out
    # By hand: per layer q, k, v, o of 32x32 + 2x16x32 + 32x32, three of 64x32, norms 2x32 + 2x8; final norm, tied head,
    # a row: all times 4, and keys and values 2 x 2 x 2 x 8 of bfloat16.
    size = 4 * (2 * (3 * 1024 + 3 * 2048 + 64 + 16) + 32 + 48 * 32 + 32) + 2 * 64
    assert f"{size / 1e9:.4f}" in alone and "1 x custom" in alone and "100% of 100 GB/s given" in alone
    assert f"{1e11 / size:,.0f}" in alone
    assert (
        main(
            [
                "roofline",
                "--gigabytes",
                "4",
                "--device",
                "custom",
                "--devices",
                "1",
                "--bandwidth",
                "33",
                "--sync-us",
                "0",
            ]
        )
        == 0
    )
    assert re.search(r"ceiling: reading alone +8.2 +100.0 +unknown", capsys.readouterr().out)
    assert main(["roofline", "--checkpoint", str(tmp_path), "--lanes", "2", *node, "--exchange-us", "7"]) == 0
    assert "4 exchanges of 7.00 us, 4 exposed landings" in capsys.readouterr().out


def test_quantized_folder_and_recipe_are_counted_as_published(tmp_path, capsys):
    quantized = QWEN | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (tmp_path / "config.json").write_text(json.dumps(quantized))
    matrices = 2 * (3 * 1024 + 3 * 2048)
    rest = 2 * (2 * (64 + 16) + 32 + 48 * 32 + 32) + 2 * 64
    for arguments in (["--checkpoint", str(tmp_path)], [str(tmp_path)]):
        for precision, size in ((), 1), (("--precision", "bfloat16"), 2):
            assert main(["roofline", *arguments, "--context", "0", *precision]) == 0
            assert f"together {'':25}{(size * matrices + rest) / 1e9:.4f}" in re.sub(
                r"together +", f"together {'':25}", capsys.readouterr().out
            )
    # By hand: attention, router and head in 2 bytes, 4 experts of each of the 24 layers in 4.25 bits.
    assert main(["roofline", "--checkpoint", "gpt_oss_20b", "--lanes", "2", "--context", "0"]) == 0
    attention, experts = 2 * 24 * 2880 * (64 * (64 + 8 + 8 + 64) + 32), 24 * 4 * 3 * 2880 * 2880 * 4.25 / 8
    out = capsys.readouterr().out
    [found] = re.findall(r"together +([\d.]+) ", out)[:1]
    assert float(found) == pytest.approx((attention + experts + 2 * 201_088 * 2880) / 1e9, rel=1e-3)
    assert "72 matrices in 4.25 bits as published" in out and "2 lanes" in out


def test_moe_models_are_reported(tmp_path, capsys):
    picture = tmp_path / "moe.png"
    assert (
        main(
            [
                "roofline",
                "--moe",
                "all",
                "--png",
                str(picture),
                "--sweep",
                "precision",
                "--json",
                str(tmp_path / "moe.json"),
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert picture.stat().st_size > 10_000 and out.count("Bytes of one token of") == 4
    assert "whether the weights fit in memory is unknown" in out and "weights of 595.00 GB fit in 1,211 GB" in out
    assert any(line.startswith("Note: deepseek-v4-flash: ") and "--kv-megabytes" in line for line in out.splitlines())
    tables = [
        t for t in json.loads((tmp_path / "moe.json").read_text())["tables"] if t["table"] == "precision of kimi-k2.6"
    ]
    rows = {row["weights"]: row for row in tables[0]["rows"]}
    assert rows["bfloat16"]["tok/s"] < rows["as published"]["tok/s"] < rows["mxfp4"]["tok/s"]


def test_published_config_is_reported(tmp_path, capsys):
    (tmp_path / "mixtral-8x7b.json").write_text(json.dumps(MIXTRAL))
    files = ("--json", str(tmp_path / "r.json"), "--png", str(tmp_path / "r.png"))
    assert (
        main(
            [
                "roofline",
                str(tmp_path / "mixtral-8x7b.json"),
                "--sweep",
                "precision",
                "--rate",
                "500",
                "--context",
                "0",
                *files,
            ]
        )
        == 0
    )
    out, tables = capsys.readouterr().out, json.loads((tmp_path / "r.json").read_text())["tables"]
    assert [table["table"] for table in tables] == ["bytes", "time", "speed", "precision of mixtral-8x7b"], (
        "other models have no nominal figures"
    )
    # By hand: experts 2 x 3 x 14,336 x 4,096 and attention 4,096 x 128 x 80 in each layer, the router, the head.
    size = 2 * (32 * (2 * 3 * 14_336 * 4096 + 4096 * 128 * 80 + 8 * 4096) + 32_000 * 4096)
    assert f"{size / 1e9:.4f}" in out and "mixtral-8x7b.json; all in bfloat16" in out and "read 2026" not in out
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_config_file_equals_its_checkpoint(folder, capsys):
    (folder / "mine.json").write_text(json.dumps(VALUES))
    shown = []
    for args in ([str(folder / "mine.json")], [str(folder)], ["--checkpoint", str(folder)]):
        assert main(["roofline", *args, "--layout", "tp"]) == 0
        shown.append(capsys.readouterr().out.partition("\n")[2])
    assert shown[0] == shown[1] == shown[2] and "waits of layout tp" in shown[0]


def test_too_large_models_are_marked(capsys):
    assert main(["roofline", "--moe", "kimi-k2.6", "--devices", "3"]) == 0
    assert "weights of 595.00 GB DO NOT FIT in 454 GB" in capsys.readouterr().out


def test_given_cache_is_counted(capsys):
    assert main(["roofline", "--moe", "deepseek-v4-flash", "--kv-megabytes", "230"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"cache and state, given +0.2300 ", out) and "10.9955" in out
    assert "Note: deepseek-v4-flash: what" not in out


def test_bytes_references_and_agent_need_no_model(tmp_path, capsys):
    assert main(["roofline", "--gigabytes", "4", "--rate", "2100"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"ceiling: reading alone +7,680 ", out) and re.search(
        r"measured +2,100 +27.3 +21.9 +measured", out
    )
    assert main(["roofline", "--gigabytes", "4", "--layers", "15"]) == 0
    assert "77 x 0.65 us" in capsys.readouterr().out
    assert main(["roofline", "--references"]) == 0
    assert "250 launches of 4.5 us alone" in capsys.readouterr().out
    assert (
        main(["roofline", "--agent", "--iterations", "3", "--test-seconds", "0", "--png", str(tmp_path / "a.png")]) == 0
    )
    assert "in 3 rounds: generating takes more than half of the time below 16,667 tok/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give CONFIG.json, --checkpoint, --moe or --gigabytes"),
        (["--checkpoint", "x:y", "--moe", "all"], "--checkpoint and --moe"),
        (["--checkpoint", "no_such_recipe"], "no_such_recipe"),
        (["--moe", "gpt"], "--moe gpt;"),
        (["--moe", "all", "--rate", "5"], "--rate needs one model"),
        (["--moe", "all", "--sweep", "layout"], "--sweep layout needs --checkpoint"),
        (["--moe", "all", "--layout", "tp"], "--layout needs --checkpoint"),
        (["--gigabytes", "0"], "--gigabytes must be above 0, got 0"),
        (["--gigabytes", "4", "--layers", "0"], "--layers needs --gigabytes"),
        (["--gigabytes", "4", "--precision", "fp8"], "--precision needs --checkpoint"),
        (["--gigabytes", "4", "--context", "9"], "--context and --kv-precision need a model"),
        (["--moe", "all", "--kv-megabytes", "9"], "--kv-megabytes needs --moe NAME"),
        (["--gigabytes", "4", "--device", "a100"], "--device a100: "),
        (["--gigabytes", "4", "--rate", "-1"], "--rate must be above 0, got -1"),
        (["--gigabytes", "4", "--sweep", "context"], "--sweep context needs --checkpoint"),
        (["--references", "--png", "r.png"], "--png needs"),
        (["--agent", "--png", "r.svg"], ".png, got r.svg"),
        (["--checkpoint", "{folder}", "--layout", "dtp"], "write dtp(delta)"),
        (["--checkpoint", "{folder}", "--devices", "3"], "4 lanes spread over 1, 2, 4"),
        (["--checkpoint", "{folder}", "--lanes", "2"], "trained with 4 lanes"),
        (["--checkpoint", "stdlib", "--lanes", "2"], "stdlib has 8 lanes"),
        (["--checkpoint", "{folder}", "--kv-precision", "fp2"], "fp2"),
        (["--checkpoint", "{folder}", "--kv-precision", "bf12"], "a format of weights"),
        (["--checkpoint", "{folder}", "--context", "65"], "longest context is 64"),
        (["--checkpoint", "{folder}/other.json"], "other.json must be a folder or its config.json"),
        (["{folder}/none.json"], "none.json does not exist"),
        (["{folder}/other.json"], "other.json: unknown model_type None"),
        (["{folder}/other.json", "--lanes", "2"], "--lanes needs --checkpoint"),
        (["{folder}/other.json", "--moe", "all"], "CONFIG.json and --moe"),
        (["{folder}/wrong.json"], "wrong.json: hidden_size"),
    ],
)
def test_bad_options_are_one_line(folder, capsys, arguments, words):
    (folder / "other.json").write_text("{}")
    (folder / "wrong.json").write_text(
        json.dumps({name: value for name, value in VALUES.items() if name != "hidden_size"})
    )
    assert main(["roofline", *(word.format(folder=folder) for word in arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and words in err
