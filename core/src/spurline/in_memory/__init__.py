"""Python objects in the places of paths: rows, functions, a model and its tokenizer, as a notebook has them.

A config holds plain values. So what can be written down is written below the run directory, under a name made of its
content, and the setting becomes that path; a function gets a reference that means something in this process alone.
"""
