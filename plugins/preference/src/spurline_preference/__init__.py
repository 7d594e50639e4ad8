"""Train on pairs of a chosen and a rejected answer: source, DPO and its variants, report panel."""
