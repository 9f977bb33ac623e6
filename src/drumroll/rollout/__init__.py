"""The rollout scheduler: the life of each sample. It emits events and owns no files."""
