"""`spurline init`: write a first config from facts about data and model."""
