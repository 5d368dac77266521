"""What needles, questions and short prompts are made of; `evaluate` has words of its own."""

from __future__ import annotations


def _words(text: str) -> list[str]:
    return text.split()


ADJECTIVES = _words("""
amber ancient arctic bitter bold brave brisk broken bronze calm candid careful cheap
clever coastal copper cosmic crimson crooked curious damp daring deep distant dusty eager early
eastern elder electric empty endless faded faint famous fancy fearless feral final flat foggy
fragile frozen gentle giant gilded glassy golden grand gray green hasty heavy hidden hollow honest
humble icy idle inner iron ivory jagged jolly keen lazy legal light little lonely loud lucky lunar
magnetic marble mellow mighty misty modest muddy narrow neat nimble noble northern odd olive open
orange outer pale patient plain polished proud purple quick quiet rapid rare red restless rough
royal rusty sacred salty scarlet secret shallow sharp shiny short silent silver simple sleepy slow
small smooth solar solid southern spare stable steady steep stormy strange strong sturdy sudden
sunny swift tall tame tender thin tiny tough twin upper urban vast velvet violet vivid warm wealthy
western white wide wild windy wise wooden yellow young""")
NOUNS = _words("""
acorn anchor antler apron arrow badger ballad banner barley barrel basin basket beacon
beetle bell bishop blanket blossom boulder bramble bridge bucket butter button cabin cable candle
canoe canyon captain carpet castle cedar cellar chapel cherry circle clover cobbler comet compass
cottage cradle crater cricket crown crystal curtain dagger daisy desert diamond dolphin donkey
dragon drum eagle ember engine falcon feather fiddle finch flame flute forest fossil fountain fox
garden garnet ginger glacier goblet granite grove guitar hammer harbor harp hawk hazel helmet heron
hill hollow honey horizon hornet island jacket jaguar jewel jungle kettle kite ladder lantern
lemon lighthouse lily lizard locket lotus magnet maple market marsh meadow mirror monk mountain
needle nest oak oasis ocean onion orchard otter owl oyster paddle palace panther parrot pasture
pebble pepper piano pigeon pillow pine planet plum pocket pond poplar prairie puzzle quarry quill
rabbit raft raven reef ribbon river robin rocket rope saddle sail salmon satchel sparrow spider
spoon spruce stable statue stone storm sword table temple thistle thunder tiger timber torch tower
trail trumpet tulip tunnel turtle valley vase village violin volcano wagon walnut waterfall whale
wheat wheel whistle willow window wolf zebra""")
FIRST_NAMES = _words("""
Alma Amir Anna Astrid Bashir Bella Boris Carla Carlos Cecil Clara Dana Daniel Diego
Edith Elena Emil Esther Fatima Felix Flora Frida George Gita Greta Hanna Hassan Helga Hugo Ida Igor
Ines Iris Ivan Jana Jasper Joan Jonas Judith Kamal Karin Kenji Lara Leo Lena Lionel Lucia Magda
Marco Maria Martin Mei Mina Mona Nadia Nils Nina Noah Nora Olga Omar Oscar Otto Pablo Paula Pedro
Petra Priya Quentin Rafael Ravi Rita Rosa Ruth Samir Sara Selma Simon Sofia Stefan Sven Tara Theo
Tomas Uma Vera Victor Viola Walter Wanda Xenia Yara Yusuf Zoe""")
LAST_NAMES = _words("""
Abbott Adeyemi Ahmed Alvarez Barnes Becker Bennett Berg Bianchi Blake Boyd Carver
Castillo Chandra Chen Clarke Costa Cruz Dahl Dawson Delgado Dixon Duarte Ekström Ellis Farrell
Fischer Fleming Flores Foster Garcia Gibson Gupta Hale Hansen Harper Hayashi Holm Hughes Ibrahim
Ito Jensen Kapoor Keller Khan Kim Kowalski Larsen Lindgren Lopez Marsh Mendez Meyer Moreau Murphy
Nakamura Navarro Novak Okafor Olsen Ortega Park Patel Pereira Petrov Quinn Ramos Reyes Rossi Russo
Sato Schmidt Shaw Silva Singh Sokolov Stone Tanaka Torres Vargas Vogel Wagner Walsh Weber Wong
Yamada Zhang""")
CITIES = _words("""
Accra Adelaide Almaty Amman Antwerp Athens Baku Bangkok Barcelona Basel Beirut Belfast
Bergen Bilbao Bogota Bologna Boston Bremen Brisbane Bristol Bruges Cairo Calgary Cardiff Casablanca
Chennai Chicago Cologne Cordoba Cusco Dakar Dallas Delhi Denver Detroit Dresden Dublin Durban Fez
Florence Geneva Genoa Ghent Glasgow Granada Graz Hamburg Hanoi Havana Helsinki Houston Istanbul
Jakarta Kiev Krakow Kyoto Lagos Lahore Leeds Leipzig Lille Lima Lisbon Liverpool Ljubljana Luanda
Lyon Madrid Malaga Manila Marrakesh Melbourne Miami Milan Montreal Mumbai Munich Nairobi Nantes
Naples Nice Odessa Osaka Oslo Ottawa Palermo Perth Porto Prague Quito Riga Rome Rotterdam Salzburg
Santiago Seattle Seoul Seville Shanghai Sofia Split Stockholm Sydney Tallinn Tbilisi Tokyo Toronto
Toulouse Trieste Tunis Turin Utrecht Valencia Vancouver Venice Verona Vienna Vilnius Warsaw Zagreb
Zurich""")

# How a value is called, for each kind of value.
VALUE_NAMES = {
    "number": ("special magic number", "special magic number", "secret number", "access code",
               "serial number", "code", "locker number", "magic number", "ticket number",
               "account number", "number", "combination", "registration number", "pass code",
               "lucky number", "PIN"),
    "uuid": ("special magic uuid", "identifier", "unique id", "device id", "session id", "uuid",
             "record id"),
    "word": ("special magic word", "password", "code word", "secret word", "nickname",
             "pass phrase", "call sign", "project name"),
    "phone": ("phone number", "extension", "emergency number", "contact number", "fax number"),
    "password": ("password", "access key", "login token", "secret key", "license key", "API key"),
    "city": ("home town", "meeting place", "destination", "favourite city", "birthplace"),
    "person": ("contact person", "owner", "teacher", "supervisor", "next of kin", "author"),
    "date": ("deadline", "birthday", "departure date", "expiry date", "date of the meeting"),
}  # fmt: skip

NEEDLES = (
    "The {kind} for {key} is {value}.",
    "The {kind} of {key} is {value}.",
    "The {kind} assigned to {key} is {value}.",
    "The {kind} of {key} is: {value}.",
    "{key} has the {kind} {value}.",
    "For {key}, the {kind} is {value}.",
    "Remember that the {kind} for {key} is {value}.",
    "Note that {value} is the {kind} for {key}.",
    "It is worth knowing that {key} was given the {kind} {value}.",
    "According to the records, the {kind} of {key} is {value}.",
    "Please keep in mind: the {kind} for {key} is {value}.",
    "{value} is the {kind} of {key}.",
    "{value} is the {kind} that belongs to {key}.",
    "A note in the margin says that the {kind} for {key} is {value}.",
    "The {kind} associated with {key} is {value}.",
    "{key}: {kind} {value}.",
    "{kind} ({key}): {value}.",
    "The {kind} which we use for {key} is {value}.",
    "Do not forget the {kind} for {key}: {value}.",
    "Somebody told me that the {kind} of {key} was changed to {value}.",
)
RULER_NEEDLE = "One of the {kind}s for {key} is: {value}."
QUESTIONS = (
    "What is the {kind} for {key}?",
    "What is the {kind} of {key}?",
    "Which {kind} does {key} have?",
    "Which {kind} belongs to {key}?",
    "Tell me the {kind} for {key}.",
    "What does the text say is the {kind} for {key}?",
    "Find the {kind} of {key} in the text above.",
    "According to the text, what is the {kind} of {key}?",
    "I need the {kind} for {key}. What is it?",
    "Look up the {kind} that the text gives for {key}.",
    "Can you recall the {kind} associated with {key}?",
    "Give only the {kind} for {key}.",
)
ANSWERS = (
    "{value}",
    "{value}.",
    "The {kind} for {key} is {value}.",
    "The {kind} of {key} is {value}.",
    "The {kind} for {key} mentioned in the text is {value}.",
    "It is {value}.",
    "{key}: {value}",
    "According to the text, the {kind} for {key} is {value}.",
)
INTRODUCTIONS = (
    "",
    "Read the following text carefully. I will ask about it afterwards.\n\n",
    "Here is a long document. Some details in it matter; remember them.\n\n",
    "Memorize the details that are hidden in this text. There will be questions.\n\n",
    "Below is some text with a few important facts in it.\n\n",
    "Text:\n",
    "Context:\n",
    "Please study this document:\n\n",
    "Some special magic {kind}s are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind}s afterwards.\n",
    "A {kind} is hidden somewhere in the following pages. Find it.\n\n",
)
# Questions and answers of a plain document, without chat turns.
PLAIN_FORMS = (
    ("\n\nQuestion: {question}\nAnswer:", " {answer}\n"),
    ("\n\nQ: {question}\nA:", " {answer}\n"),
    ("\n\n{question}", " {answer}\n"),
    ("\n\n{question}\n", "{answer}\n"),
    ("\n{question} Answer:", " {answer}\n"),
)
NOISE = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.",
    "The rain falls on the roof. The road is long. The lamp is lit. Nobody is at home.",
    "A train passes by. The clock ticks. The tea is getting cold. We wait a little longer.",
    "Birds sing in the morning. Leaves turn red in the autumn. The river runs to the sea.",
    "Time goes by. People come and go. The shop opens at nine. The shop closes at five.",
    "One sheep jumps over the fence. Another sheep follows. The field is wide and quiet.",
)

# (sentence, question, answer): facts told in passing.
FACTS = (
    ("{name} hid the old map behind the stove in {city}.",
     "Where did {name} hide the old map?", "Behind the stove in {city}."),
    ("On that evening {name} decided to sell the {adjective} {noun} and move to {city}.",
     "To which city did {name} decide to move?", "{city}"),
    ("{name} keeps a {adjective} {noun} as a pet and calls it {word}.",
     "How does {name} call the pet?", "{word}"),
    ("The museum of {city} is known for its collection of {adjective} {noun}s.",
     "What is the museum of {city} known for?", "Its collection of {adjective} {noun}s."),
    ("It was {name} who repaired the {noun} of the {noun2} tower in the year {year}.",
     "Who repaired the {noun} of the {noun2} tower?", "{name}"),
    ("It was {name} who painted the {adjective} {noun} in the year {year}.",
     "In which year did {name} paint the {adjective} {noun}?", "{year}"),
    ("The recipe of {name} needs {count} spoons of {noun} powder and nothing else.",
     "How many spoons of {noun} powder does the recipe of {name} need?", "{count}"),
    ("The password of the {adjective} {noun} club, as {name} told us, is \"{word} {noun2}\".",
     "What is the password of the {adjective} {noun} club?", "{word} {noun2}"),
    ("When asked about a favourite colour, {name} always answered {adjective} {word}.",
     "What did {name} answer when asked about a favourite colour?", "{adjective} {word}"),
    ("The ferry from {city} to {city2} leaves at {hour}:{minute} from pier {count}.",
     "When does the ferry from {city} to {city2} leave?", "At {hour}:{minute}."),
    ("The ship {word} was built in {city} and carried {noun}s for {count} years.",
     "In which city was the ship {word} built?", "{city}"),
)  # fmt: skip

# Short instructions, for keeping what the stock model says to them.
TOPICS = _words("""
photosynthesis gravity inflation democracy vaccination erosion electricity friction
evolution encryption magnetism recycling insurance compound-interest machine-learning databases
the-water-cycle the-solar-system the-French-Revolution the-Roman-Empire the-Industrial-Revolution
volcanoes earthquakes rainbows thunderstorms tides bees whales dinosaurs penguins chess football
jazz opera poetry cooking gardening cycling swimming meditation time-management public-speaking
job-interviews climate-change renewable-energy batteries airplanes bridges compilers the-internet
operating-systems hash-tables recursion sorting-algorithms binary-search prime-numbers fractions
percentages probability triangles vitamins sleep exercise the-human-heart the-brain DNA""")
INSTRUCTIONS = (
    "Explain {topic} in simple terms.",
    "What is {topic}?",
    "Write a short paragraph about {topic}.",
    "Give me three interesting facts about {topic}.",
    "Why does {topic} matter?",
    "List five words that have to do with {topic}.",
    "Write a poem of four lines about {topic}.",
    "How would you teach a child about {topic}?",
    "Write a short story about a {noun} and {topic}.",
    "What are the advantages and disadvantages of {topic}?",
    "Write an email to {name} about {topic}.",
    "Write a Python function that has to do with {topic}.",
    "What is the capital of {country}? Answer in one sentence.",
    "Tell me something about {country}.",
    "I have {count} {noun}s and buy {count2} more. How many do I have?",
    "What is {count} times {count2}?",
    "Suggest a name for a {adjective} {noun}.",
    "What is the opposite of {adjective}?",
    "Use the words {adjective} and {noun} in one sentence.",
    "Who are you?",
    "Plan a weekend in {city}.",
    "Write a dialogue between {name} and a {noun}.",
)
MONTHS = _words("January March April May June July August October November December")
COUNTRIES = _words("""
France Germany Italy Spain Portugal Norway Sweden Finland Poland Greece Turkey Egypt
Kenya Nigeria Morocco India China Japan Vietnam Thailand Indonesia Australia Canada Mexico Brazil
Argentina Chile Peru Colombia Cuba Ireland Iceland Austria Hungary Romania""")
