"""Draft heads are made here: text from the target, training, and how much of it they foresee."""
