"""Tokens kept on disk, found again by what they were made of, and read memory-mapped.

`key` says what identifies tokens, `folder` finds and commits entries, `writer` streams samples to disk, `mapped_store`
reads them and checks every block on first touch, `upkeep` lists, verifies and prunes. Nothing here tokenizes.
"""
