"""Operations on arrays beside products and their reductions: what steps of programs do between products."""
