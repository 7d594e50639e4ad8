"""From a run directory to one self-contained HTML page with plots.

Way of the data: `record.read_record` -> panels -> `page.write_report`. Imports no torch.
"""
