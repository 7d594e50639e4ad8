"""What a run did: HTML report, comparison of runs, `spurline view`, notebooks, warnings."""
