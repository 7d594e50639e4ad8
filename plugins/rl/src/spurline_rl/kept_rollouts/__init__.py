"""The rollouts that a run stores for later inspection: one Parquet file per step in `rollouts/`."""

from spurline_rl.kept_rollouts.reader import ROLLOUTS_FOLDER, KeptAttempt, KeptRollouts, KeptTurn, LostPrompt

__all__ = ["ROLLOUTS_FOLDER", "KeptAttempt", "KeptRollouts", "KeptTurn", "LostPrompt"]
