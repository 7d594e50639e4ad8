"""The rollout engine `in_process`. Start reading at `engine.py`.

engine (asyncio) -> decoder (a step at a time, on a thread) -> cached_attention and sampling -> row, stop_texts
"""
