"""What is made for a release, beside the package itself."""
