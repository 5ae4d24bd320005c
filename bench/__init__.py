"""Our numbers beside a reference's, both measured in the same run: `nox -s bench`."""
