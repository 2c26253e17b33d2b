"""Work queues by a recipe, on any `CoordStore`: items, session-bound locks, atomic commits."""
