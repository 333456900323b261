"""Settings: whether their values make sense, whoever gives them."""
