"""Turn a run directory into one self-contained HTML page with plots.

Place on the way: `record.read_record` -> panels -> `page.write_report`. Imports no torch.
"""
