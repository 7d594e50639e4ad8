"""dataset -> tokens -> order -> batch."""
