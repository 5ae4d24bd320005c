"""Named files that take commands of bounded size: what the store stands on."""
