"""A tuner of tiled products: search space, code generator, cost model, search planner, history of measurements."""
