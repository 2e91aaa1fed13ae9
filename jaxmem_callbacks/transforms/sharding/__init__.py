"""Where a training state lies on a mesh: a state, a mesh and a policy enter, one sharding an array leaves."""
