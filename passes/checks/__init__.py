"""What a pass may change in the numbers, how that is checked, and how to reproduce a failure."""
