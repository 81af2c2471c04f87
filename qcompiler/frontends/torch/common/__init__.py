"""What every part of this frontend needs: places in the user's program, symbolic sizes, names of dtypes."""
