"""The rollouts that a run keeps for people to look at: the file `rollouts.jsonl.gz`, its writer and its reader."""

from spurline_rl.kept_rollouts.members import ROLLOUTS_FILE
from spurline_rl.kept_rollouts.reader import KeptAttempt, KeptRollouts, KeptTurn, LostPrompt

__all__ = ["ROLLOUTS_FILE", "KeptAttempt", "KeptRollouts", "KeptTurn", "LostPrompt"]
