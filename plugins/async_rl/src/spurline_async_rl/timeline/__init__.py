"""What an asynchronous run did when: written beside its metrics, drawn in the report, read by `spurline simulate`."""
