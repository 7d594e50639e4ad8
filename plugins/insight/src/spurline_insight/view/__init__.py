"""Serve the local page of `spurline view` over the directories of finished and running runs.

Place on the way: files of a run -> `runs.ViewedRun` -> routes of `app` -> the page in `static/`. `server` listens on
the loopback, `guard` lets in the browser that has the token. Nothing here writes a file or imports torch.
"""
