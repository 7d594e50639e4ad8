"""Record what an asynchronous run does at which time, for its report and for `spurline simulate`."""
