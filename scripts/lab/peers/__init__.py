"""Other engines for `python -m scripts.bench_peers`: one program for each, run with the Python of its environment."""
