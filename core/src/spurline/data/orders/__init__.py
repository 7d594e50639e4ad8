"""Which sample comes when: the orders, and the facts about samples that they decide by."""
