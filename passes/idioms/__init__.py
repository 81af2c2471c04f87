"""The decomposed forms that `raise-idioms` recognises, one file each."""
