"""Operations on tensors: one Protocol, a native implementation and its plain torch twin."""
