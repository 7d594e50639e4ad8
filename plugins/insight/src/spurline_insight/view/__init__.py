"""`spurline view`: a local page over the directories of finished and running runs.

Way of the data: files of a run -> `runs.ViewedRun` -> routes of `app` -> the page in `static/`. `server` listens on the
loopback, `guard` lets in who has the token. Nothing here writes a file or imports torch;
`samples` starts a process that does, when a reader asks for it.
"""
