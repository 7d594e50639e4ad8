"""`spurline generate`: answers of a trained model, or of any other, to the prompts of a person."""
