"""Token stores that tests write, and comparisons of their files."""

import numpy as np

from laneformer.train.data.store import StoreWriter


def document(number):
    """Split, token ids and loss mask of a document, which all vary with its number."""
    ids = np.random.default_rng(number).integers(1, 99, number * 7 % 11)
    return ("validation" if number % 4 == 1 else "train"), ids, ids % 2 == 0 if number % 4 == 1 else None


TOKENIZER = b'{"any": "bytes"}'


def content(path):
    """Contents of all files of a folder by relative path, hidden files included."""
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def take(path, total, *, settings, every=3, stop=None, **options):
    """Writes documents [writer.done, total), with a checkpoint after every `every` documents. Raises RuntimeError
    before document `stop`. Returns the number of the first document written.
    """
    with StoreWriter(
        path, tokenizer=TOKENIZER, vocab_size=100, eos_id=0, settings=settings, **{"shard_tokens": 20, **options}
    ) as writer:
        first = writer.done
        for number in range(first, total):
            if number == stop:
                raise RuntimeError("died")
            split, ids, loss = document(number)
            writer.add(split, ids, 3 * len(ids), loss)
            if (number + 1) % every == 0:
                writer.checkpoint(number + 1)
        writer.finish({"text": "test"})
    return first
