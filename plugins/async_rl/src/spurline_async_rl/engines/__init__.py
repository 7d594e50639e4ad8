"""A pool of rollout engines behind one object: routing, restarts, requests that go on where a dead engine left them.

pool -> routing -> pooled_engine (one engine, start to death) -> member; continuation joins what several engines wrote
"""
