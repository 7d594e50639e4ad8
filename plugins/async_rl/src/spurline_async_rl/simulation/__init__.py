"""`spurline simulate`: the scheduler on a virtual clock."""
