"""`spurline init`: a first config, written from what the data and the model say of themselves."""
