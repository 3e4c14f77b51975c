"""Programming problems: samples, verdicts and scores."""
