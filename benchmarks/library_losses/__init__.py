"""The losses and estimators of TRL, verl and OpenRLHF on fixed numbers, for comparison with ours."""
