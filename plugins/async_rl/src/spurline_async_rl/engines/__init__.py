"""A pool of rollout engines behind one object: routing, restarts, requests that go on where a dead engine left them.

pool -> member (one engine, start to death) -> child process, vLLM engine, actor or server. Requests are continued by
`continuation`; everything else that an engine gets is one of `commands`.
"""
