"""The rollout engine `in_process`. Start reading at `engine.py`.

engine (asyncio) -> decode_thread -> decoder -> cached_attention (the model) and sampling -> row, stop_texts
"""
