"""Tokens kept on disk, found again by what they were made of, and read memory-mapped.

`key` says what identifies tokens, `entry` opens an entry, `folder` finds and commits entries, `writer` streams samples
to disk, `upkeep` lists, verifies and removes entries. Nothing here tokenizes.
"""
