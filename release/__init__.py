"""What a release needs besides the package itself: its wheel, its bill of materials, and tests of the wheel."""
