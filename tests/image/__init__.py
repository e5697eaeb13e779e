"""The image, played for real: `make image-test` (`.ci/image-test`)."""
