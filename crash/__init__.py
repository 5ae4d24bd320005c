"""The crash contract of the gateway: kill it, cut its power, damage its files, and look what is left."""
