"""The source `async_rollouts`: groups are generated on an event loop of their own while the model trains."""
