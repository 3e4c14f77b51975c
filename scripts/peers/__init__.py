"""Other engines for `python -m scripts.bench_peers`: a program for each, run with the Python of an environment of its
own.
"""
