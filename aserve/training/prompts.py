"""What people ask an assistant, written by templates: some hundreds of thousands of questions.

Plain English of our own, for training; `HELD_OUT` are for measuring and occur in no template.
"""

import random
import re

SUBJECTS = """photosynthesis; black holes; the water cycle; plate tectonics; vaccines; gravity;
supply and demand; inflation; the French Revolution; the Silk Road; the Roman Empire; the
Industrial Revolution; the printing press; electric cars; solar panels; wind power; nuclear
fusion; batteries; the human heart; the immune system; sleep; memory; dreams; habits;
procrastination; stress; anxiety; meditation; yoga; running; swimming; weight training; nutrition;
protein; vitamins; sugar; coffee; green tea; chocolate; sourdough bread; fermentation; olive oil;
spices; rice; pasta; soup; salad; gardening; compost; houseplants; bees; butterflies; whales;
sharks; wolves; cats; dogs; horses; penguins; owls; dinosaurs; fossils; volcanoes; earthquakes;
hurricanes; rainbows; the tides; deserts; rainforests; coral reefs; glaciers; climate change;
recycling; plastic; paper; glass; steel; concrete; bridges; skyscrapers; trains; aeroplanes;
ships; bicycles; satellites; rockets; the moon; Mars; Jupiter; comets; telescopes; microscopes;
atoms; molecules; acids and bases; magnets; electricity; light; sound; heat; entropy; evolution;
genes; DNA; cells; bacteria; viruses; mushrooms; trees; flowers; seeds; soil; rivers; lakes;
oceans; maps; compasses; clocks; calendars; money; banks; taxes; insurance; mortgages; stocks;
bonds; budgeting; saving; credit cards; small businesses; marketing; negotiation; leadership;
teamwork; public speaking; job interviews; resumes; remote work; email; social media; privacy;
passwords; encryption; computers; operating systems; the internet; web browsers; databases;
algorithms; recursion; sorting; hash tables; binary search; machine learning; neural networks;
robots; video games; chess; poker; football; basketball; tennis; cricket; the Olympics; painting;
sculpture; photography; film; theatre; dance; opera; jazz; rock music; the piano; the guitar; the
violin; poetry; novels; short stories; fairy tales; myths; history; philosophy; ethics; logic;
democracy; law; human rights; education; homework; exams; languages; grammar; spelling;
handwriting; libraries; museums; travel; camping; hiking; cooking; baking; sewing; knitting;
woodworking; cleaning; moving house; pets; parenting; friendship; marriage; weddings; birthdays;
holidays; gifts; fashion; shoes; furniture"""

PEOPLE = """a teacher; a nurse; a young doctor; a farmer; a retired engineer; a shy student; a new
parent; a chef; a small business owner; a software developer; a carpenter; a librarian; a
journalist; a lawyer; a taxi driver; a musician; a painter; a gardener; a pilot; a sailor; a
firefighter; a detective; a king; a lonely robot; a curious child; an old fisherman; a travelling
merchant; a clever fox; a dragon; an astronaut; a lighthouse keeper; a clockmaker; a scientist; a
football coach; a shopkeeper; a witch; my grandmother; my neighbour; my brother; my boss; a
friend; a customer; a class of ten-year-olds"""

PLACES = """Paris; London; Rome; Tokyo; New York; Cairo; Istanbul; Mumbai; Berlin; Madrid; Lisbon;
Vienna; Prague; Sydney; Toronto; Mexico City; Rio de Janeiro; Buenos Aires; Nairobi; Cape Town;
Bangkok; Singapore; Seoul; Beijing; Moscow; Athens; Dublin; Oslo; Iceland; Norway; Scotland;
Italy; Greece; Turkey; Egypt; Morocco; India; Nepal; Vietnam; Japan; Australia; New Zealand;
Canada; Brazil; Peru; a small village; a forest; an island; the mountains; the desert; a space
station; an old castle; a school; a hospital; a market; a train; a library at night; a city under
the sea"""

FEELINGS = """tired; nervous; lonely; bored; excited; confused; overwhelmed; angry; sad; hopeful;
stuck; jealous; grateful; afraid of failing; worried about money; homesick; unmotivated; proud"""

GOALS = """learn to cook; learn Spanish; learn to code; run five kilometres; lose some weight;
sleep better; save money; read more books; write a novel; start a blog; get a promotion; change
careers; find a job; make new friends; be more organised; eat less sugar; drink more water; stop
procrastinating; learn the guitar; draw better; speak in public; plan a wedding; plan a birthday
party; move to another city; start a vegetable garden; train a puppy; fix a leaking tap; paint a
room; build a bookshelf; study for exams; improve my essay writing; use my phone less; manage my
time; set up a budget; host a dinner; travel on a small budget; take better photographs; build a
website; invest for the first time"""

TASKS = """reverses a string; checks whether a word is a palindrome; counts the vowels in a text;
finds the largest number in a list; removes duplicates from a list; sorts a list of numbers;
computes a factorial; prints the Fibonacci numbers; checks whether a number is prime; converts
Celsius to Fahrenheit; reads a file line by line; counts how often each word occurs; merges two
sorted lists; flattens a nested list; computes the average of a list; finds the second largest
number; generates a random password; draws a triangle of stars; plays rock, paper, scissors; keeps
a to-do list; validates an email address; sums the digits of a number; transposes a matrix; finds
common elements of two lists; implements a stack"""

WRITINGS = """a short story; a poem; a haiku; a limerick; a letter; an email; a speech; a song; a
fable; a scene; a diary entry; a dialogue; a joke; a riddle; a product description; a blog post; a
tweet; a slogan; an invitation; a thank-you note; a news report; a bedtime story; an apology; an
advertisement"""

ADJECTIVES = """old; new; brave; quiet; broken; golden; hidden; forgotten; tiny; enormous;
magical; ordinary; mysterious; happy; unlucky; honest; stubborn; gentle; famous; strange"""

THINGS = """key; letter; umbrella; violin; garden; clock; boat; mirror; map; hat; bicycle; door;
lamp; bridge; coin; book; ring; train; tree; window; suitcase; photograph; bell; kite; river"""

TEMPLATES = (
    "What is {subject}?",
    "Explain {subject} in simple terms.",
    "Explain {subject} to {person}.",
    "How does {subject} work?",
    "Why is {subject} important?",
    "What is the history of {subject}?",
    "Tell me three interesting facts about {subject}.",
    "Give me {number} tips about {subject}.",
    "What are the advantages and disadvantages of {subject}?",
    "What is the difference between {subject} and {subject2}?",
    "Compare {subject} with {subject2}.",
    "How are {subject} and {subject2} related?",
    "I want to know more about {subject}. Where should I begin?",
    "Can you recommend some books about {subject}?",
    "Write a short paragraph about {subject}.",
    "Summarize what you know about {subject} in {number} sentences.",
    "What are some common myths about {subject}?",
    "Make a quiz with {number} questions about {subject}.",
    "Write an introduction for an essay on {subject}.",
    "How can I {goal}?",
    "I want to {goal}. Can you help me make a plan?",
    "What are the first steps to {goal}?",
    "Give me {number} ideas to {goal}.",
    "I have been trying to {goal}, but I keep giving up. What should I do?",
    "How long does it take to {goal}?",
    "Make a weekly schedule that helps me {goal}.",
    "I feel {feeling}. What can I do?",
    "I feel {feeling} because of {subject}. Any advice?",
    "My friend is {feeling}. How can I help?",
    "How do I tell {person} that I am {feeling}?",
    "What are the best things to see in {place}?",
    "Plan a {number}-day trip to {place}.",
    "What should I pack for a trip to {place}?",
    "Describe {place} in a few sentences.",
    "What food should I try in {place}?",
    "What is the weather like in {place} in the spring?",
    "Write {writing} about {subject}.",
    "Write {writing} about {person} in {place}.",
    "Write {writing} about {person} and the {adjective} {thing}.",
    "Write {writing} for {person} about {subject}.",
    "Write {writing} that begins with the words 'The {adjective} {thing}'.",
    "Write {writing} in which {person} meets {person2}.",
    "Write a Python function that {task}.",
    "How do I write a program that {task}?",
    "Write a JavaScript function that {task}, and explain it.",
    "Explain step by step how to write code that {task}.",
    "What is {number} times {number2}?",
    "What is {number} plus {number2}?",
    "If I have {number2} apples and give away {number}, how many are left?",
    "A train travels {number2} miles in {number} hours. What is its speed?",
    "A book costs {number} dollars. How much do {number2} books cost?",
    "Convert {number2} kilometres to miles.",
    "Rewrite this sentence politely: I do not like your idea about {subject}.",
    "Correct the grammar: me and {person} was talking of {subject} yesterday.",
    "Give me {number} synonyms for '{adjective}'.",
    "Use the words {thing}, {thing2} and {adjective} in a sentence.",
    "List {number} things that {person} might say about {subject}.",
    "Imagine you are {person}. What do you think of {subject}?",
    "Act as {person} and give me advice about {subject}.",
    "Give me a recipe with {number} ingredients for dinner tonight.",
    "Suggest {number} names for a shop about {subject}.",
    "What would happen without {subject}?",
    "Is it true that {subject} can change the way we think about {subject2}?",
    "What questions should I ask {person} about {subject}?",
    "Help me start a conversation with {person}.",
    "What is the capital of the country where {place} is?",
    "Translate 'Where is the {thing}?' into French.",
    "Sort these words by the alphabet: {thing}, {thing2}, {adjective}.",
    "Describe the {adjective} {thing} to someone who cannot see it.",
)

# How people begin and end; "" most of the time.
OPENINGS = ("", "", "", "", "", "Hi! ", "Hello, ", "Please help me. ", "Quick question: ", "Hey, ")
ENDINGS = (
    "",
    "",
    "",
    "",
    "",
    "",
    " Thanks!",
    " Please be brief.",
    " Answer in detail.",
    " Use a list.",
)

HELD_OUT = (
    "What causes the seasons on Earth?",
    "How do I boil an egg so that the yolk stays soft?",
    "Who wrote Romeo and Juliet, and what is it about?",
    "Can you explain what a mortgage is as if I were twelve?",
    "My laptop is very slow lately. What can I check?",
    "Give me five ideas for a cheap lunch at the office.",
    "Why do leaves change colour in autumn?",
    "Write a two-line birthday wish for my sister.",
    "What is the tallest mountain in the world and how was it measured?",
    "How many legs do three spiders and two ants have together?",
    "What should I say when I am late for a meeting?",
    "Explain the rules of chess to a beginner.",
    "Is it better to study in the morning or at night?",
    "Write a short story about a cat that is afraid of mice.",
    "How can I remove a coffee stain from a white shirt?",
    "What is the difference between a virus and a bacterium?",
    "List the planets of our solar system in order.",
    "Write a Python program that asks for a name and greets the user.",
    "What are some good questions to ask at the end of a job interview?",
    "Why is the sky blue?",
    "How does a refrigerator keep food cold?",
    "Suggest three exercises for a stiff back.",
    "What does the word 'serendipity' mean? Use it in a sentence.",
    "I cannot fall asleep. What can I try tonight?",
    "Who was Marie Curie?",
    "How do I politely decline an invitation?",
    "What is 15 percent of 240?",
    "Give me a simple pancake recipe.",
    "Why do we have leap years?",
    "Describe a perfect day at the beach.",
    "What are the main parts of a plant and what do they do?",
    "How do I change a flat tyre?",
    "Tell me a fun fact about octopuses.",
    "Write an email to my landlord about a broken heater.",
    "What is the best way to learn new words in a foreign language?",
    "How do planes stay in the air?",
    "Name some famous paintings and who painted them.",
    "What is a healthy breakfast for a busy person?",
    "Explain what an API is.",
    "My goldfish died and my son is sad. What should I tell him?",
)


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip().replace("\n", " ") for part in text.split(";"))


WORDS = {
    "subject": _listed(SUBJECTS),
    "person": _listed(PEOPLE),
    "place": _listed(PLACES),
    "feeling": _listed(FEELINGS),
    "goal": _listed(GOALS),
    "task": _listed(TASKS),
    "writing": _listed(WRITINGS),
    "adjective": _listed(ADJECTIVES),
    "thing": _listed(THINGS),
    "number": ("two", "three", "four", "five", "six", "seven", "ten", "3", "4", "5", "8", "12"),
}
SLOT = re.compile(r"\{(\w+?)(\d?)\}")


def question(chance: random.Random) -> str:
    """One of them, as `chance` has it."""
    taken: set[str] = set()

    def word(slot: re.Match[str]) -> str:
        if slot[0] == "{number2}":
            return str(chance.randint(13, 240))
        free = [one for one in WORDS[slot[1]] if one not in taken]
        taken.add(chosen := chance.choice(free))
        return chosen

    asked = SLOT.sub(word, chance.choice(TEMPLATES))
    return chance.choice(OPENINGS) + asked + chance.choice(ENDINGS)
