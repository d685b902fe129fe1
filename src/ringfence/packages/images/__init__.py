"""Container images, fetched without a container engine, as root file systems of boxes."""
