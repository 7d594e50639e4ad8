"""Show the results of runs: HTML report, comparison of runs, `spurline view`, notebooks, warnings."""
