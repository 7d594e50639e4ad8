"""Serve the local page of `spurline view`, which shows finished and running runs.

`runs` reads the files of a run, `app` answers the requests of the page in `static/`, `guard` asks for the token, and
`command` listens on 127.0.0.1. Nothing here writes a file or imports torch.
"""
