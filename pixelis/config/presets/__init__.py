"""Named settings: algorithms (`rft.algorithm`) and rewards (`rewards.preset`)."""
