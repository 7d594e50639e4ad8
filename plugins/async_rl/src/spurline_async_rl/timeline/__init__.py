"""Record the timeline of an asynchronous run, for its report and for `spurline simulate`."""
