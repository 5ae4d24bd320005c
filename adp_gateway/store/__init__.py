"""Where objects live: the `ObjectStore` contract and the two stores that keep it."""
