"""Keep tokens on disk, find them again by what they were made of, and read them memory-mapped.

`key` says what identifies tokens, `entry` writes and opens one entry, `folder` finds, commits, lists and removes
entries. Nothing here tokenizes.
"""
