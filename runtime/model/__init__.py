"""What is done to the parameters of a whole model: adopt, gather eagerly, unfreeze, move, summon in full, save."""
